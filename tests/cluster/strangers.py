"""Strangers at the ports of a job, and the ports of its processes.

As a program, which needs the standard library only: `DEED TABLES HOST`. It does the deed at each port that listens, once, as soon as it
sees the port in the kernel's TABLES (a folder such as /proc/1/net): at the port's own address, or at HOST, if one is given. It says
which ports it has been to.
"""

import os
import re
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

MOST_S = 5.0
NOISE = 64 << 20
CROWD = 2000
HELLO = b'{"rank": 1, "about": "us", "nonce": "0", "proof": "0"}\n'


def listening_in(folder):
    """The addresses and inodes of the sockets that listen, as the kernel's tables in a folder have them."""
    for table in ("tcp", "tcp6"):
        for line in Path(folder, table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A":
                address, port = local.split(":")
                # The kernel writes the four bytes backwards, also at the end of an address of IPv6.
                yield socket.inet_ntoa(bytes.fromhex(address)[:-5:-1]), int(port, 16), inode


def ports_of(process):
    """The addresses and TCP ports at which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            inodes.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(entry)))
    return {(host, port) for host, port, inode in listening_in(f"/proc/{process}/net") if inode in inodes}


def connected(address):
    return socket.create_connection(address, timeout=MOST_S)


def stay(address):
    """Connects, and stays."""
    return [connected(address)]


def half(address):
    """Says nothing more after half a message, or none."""
    kept = [connected(address) for _ in range(4)]
    for number, each in enumerate(kept):
        each.sendall(b"{" * (number % 2))
        if number > 1:
            each.shutdown(socket.SHUT_WR)
    return kept


def crowd(address):
    """Opens many connections, and keeps them for a while."""
    kept = []
    for number in range(CROWD):
        kept.append(socket.socket())
        kept[-1].setblocking(False)
        kept[-1].connect_ex(address)
        if number % 100 == 0:
            time.sleep(0.005)
    time.sleep(3.0)
    for each in kept:
        each.close()


def noise(address):
    """Sends 64 MB as fast as they are taken."""
    with connected(address) as each:
        until_s, piece = time.monotonic() + 2 * MOST_S, os.urandom(1 << 16)
        for _ in range(NOISE // len(piece)):
            each.sendall(piece)
            if time.monotonic() > until_s:
                break


def replay(address):
    """Says what was said to it, on the same connection and on another one."""
    said = HELLO
    for _ in range(3):
        with connected(address) as each:
            each.settimeout(1.0)
            for _ in range(2):
                each.sendall(said)
                with suppress(OSError):
                    said = each.recv(1 << 16) or said


def ranks(address):
    """Claims to be a rank, or to be the other end of one of gloo's pairs, and stays."""
    kept = [connected(address) for _ in range(17)]
    for number, each in enumerate(kept):
        with suppress(OSError):
            each.sendall(struct.pack("<q", number) if number < 16 else HELLO)
    return kept


DEEDS = {deed.__name__: deed for deed in (stay, half, crowd, noise, replay, ranks)}


def main(deed, tables, host):
    kept, seen = [], set()

    def do(address):
        with suppress(OSError):
            kept.append(DEEDS[deed](address))
        print(f"been at {address[1]}", flush=True)

    while True:
        time.sleep(0.005)
        with suppress(OSError):
            for at, port, _ in listening_in(tables):
                if port not in seen and not (host and at.startswith("127.")):
                    seen.add(port)
                    there = host or ("127.0.0.1" if at == "0.0.0.0" else at)
                    threading.Thread(target=do, args=((there, port),), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])

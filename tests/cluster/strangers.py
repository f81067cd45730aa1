"""Strangers at the ports of a group.

As a program, which needs the standard library only: `[DEED [NAMESPACE HOST]]`. Without a deed, it prints the address, the port and the inode
of each socket that listens on this machine. Otherwise it does the deed at each of these sockets, as soon as it sees it: at its own address,
or, from another network namespace, at HOST. It says which ports it has been to.
"""

import ctypes
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

MOST_S = 5.0
NOISE = 64 << 20
CROWD = 2000
HELLO = b'{"rank": 1, "about": "us", "nonce": "0", "proof": "0"}\n'

# See sock_diag(7), linux/netlink.h and linux/inet_diag.h.
_DIAGNOSES, _REQUEST, _DUMP, _BY_FAMILY, _LISTENING = 4, 0x1, 0x300, 20, 1 << 10


def listening(diagnoses):
    """Yields the address, the port and the inode of each socket that listens where a netlink socket is.

    The tables in /proc have the same, but the kernel takes milliseconds to write them.
    """
    for family, size in ((socket.AF_INET, 4), (socket.AF_INET6, 16)):
        asks = family, socket.IPPROTO_TCP, 0, _LISTENING
        diagnoses.send(struct.pack("=IHHIIBBBxI48x", 72, _BY_FAMILY, _REQUEST | _DUMP, 0, 0, *asks))
        while part := diagnoses.recv(1 << 16):
            while part and struct.unpack_from("=H", part, 4)[0] == _BY_FAMILY:
                (port,), (inode,) = struct.unpack_from(">H", part, 20), struct.unpack_from("=I", part, 84)
                yield socket.inet_ntop(family, part[24 : 24 + size]).removeprefix("::ffff:"), port, inode
                part = part[struct.unpack_from("=I", part)[0] :]
            if part:
                break


def connected(address):
    return socket.create_connection(address, timeout=MOST_S)


def stay(address):
    """Connects, and stays."""
    return [connected(address)]


def half(address):
    """Says nothing more after half a message, or none."""
    clients = [connected(address) for _ in range(4)]
    for number, client in enumerate(clients):
        client.sendall(b"{" * (number % 2))
        if number > 1:
            client.shutdown(socket.SHUT_WR)
    return clients


def crowd(address):
    """Opens many connections, and keeps them for as long as it takes that the processes look at theirs: once per second."""
    clients = []
    for number in range(CROWD):
        clients.append(socket.socket())
        clients[-1].setblocking(False)
        clients[-1].connect_ex(address)
        if number % 100 == 0:
            time.sleep(0.005)
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:
        time.sleep(0.1)
    for client in clients:
        client.close()


def noise(address):
    """Sends 64 MB as fast as they are taken."""
    with connected(address) as client:
        until_s, piece = time.monotonic() + 2 * MOST_S, os.urandom(1 << 16)
        for _ in range(NOISE // len(piece)):
            client.sendall(piece)
            if time.monotonic() > until_s:
                break


def replay(address):
    """Says what was said to it, on the same connection and on another one."""
    message = HELLO
    for _ in range(3):
        with connected(address) as client:
            client.settimeout(1.0)
            for _ in range(2):
                client.sendall(message)
                with suppress(OSError):
                    message = client.recv(1 << 16) or message


def ranks(address):
    """Claims to be a rank, or to be the other end of one of gloo's pairs, and stays."""
    clients = [connected(address) for _ in range(17)]
    for number, client in enumerate(clients):
        with suppress(OSError):
            client.sendall(struct.pack("<q", number) if number < 16 else HELLO)
    return clients


DEEDS = {deed.__name__: deed for deed in (stay, half, crowd, noise, replay, ranks)}


def main(deed="", namespace="", host=""):
    diagnoses = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _DIAGNOSES)
    if not deed:
        for listener in listening(diagnoses):
            print(*listener)
        return
    if namespace:
        with open(namespace) as other:
            assert ctypes.CDLL(None).setns(other.fileno(), 0) == 0
    seen, clients = set(), []

    def do(address):
        with suppress(OSError):
            clients.append(DEEDS[deed](address))
        print(f"been at {address[1]}", flush=True)

    while True:
        for listener in {*listening(diagnoses)} - seen:
            seen.add(listener)
            address, port, _ = listener
            if not (host and address.startswith("127.")):
                place = host or {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
                threading.Thread(target=do, args=((place, port),), daemon=True).start()
        time.sleep(0.005)


if __name__ == "__main__":
    main(*sys.argv[1:])

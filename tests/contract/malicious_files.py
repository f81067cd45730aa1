"""Makes malicious files of good ones, and reads them in a process that says of each how it went.

As a program: `malicious_files.py FOLDER FIRST LAST`, where FOLDER/good holds the good files. Each file is made from its number alone.
"""

import faulthandler
import json
import os
import random
import re
import resource
import shutil
import struct
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

KINDS = ("checkpoint", "export", "weights", "model", "summaries")

FILE_S = 60
MOST_MEMORY = 12 << 30

HOSTILE = (
    2**63 - 1, -1, 2**31, 1e308, None, True, "", "../../../outside", "/tmp/outside", "\x1b]0;x\x07\x1b[2J[/]", "O", "V1000000000",
    [], {}, [2**62, 2**62], [0, 2**62], {"__array__": "../w"}, {"__bytes__": 5}, {"class_name": "Lambda", "config": {}}, "os.system",
)  # fmt: skip


def keras_lambda():
    """A layer that would run code."""
    return {
        "module": "keras.layers",
        "class_name": "Lambda",
        "config": {
            "name": "lambda",
            "function": {"class_name": "__lambda__", "config": {"code": "4wEA", "defaults": None, "closure": None}},
        },
    }


def made_from(good, kind, number, folder):
    """Makes malicious file `number` in an empty folder. Returns the path that its reader takes."""
    chance = random.Random(number)
    target = folder / kind
    if (good / kind).is_dir():
        shutil.copytree(good / kind, target)
        changed = chance.choice(sorted(path for path in target.rglob("*") if path.is_file()))
    else:
        (source,) = good.glob(f"{kind}.*")
        changed = target = shutil.copyfile(source, folder / source.name)
    deeds = [bytes_changed, bytes_changed, cut, stretched, links]
    if changed.suffix == ".safetensors":
        deeds = [*deeds, *[header_changed] * 6]
    elif changed.suffix == ".json":
        deeds = [*deeds, *[json_changed] * 5]
    elif changed.suffix == ".keras":
        deeds = [*deeds, *[zip_changed] * 8]
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        chance.choice(deeds)(chance, changed)
        if changed.is_symlink() or not changed.is_file() or changed.stat().st_size > 10_000_000:
            break
    return target


def bytes_changed(chance, path):
    """Some bytes are others, or a number is."""
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 3, 20))):
        at = chance.randrange(len(data) + 1)
        new = chance.choice(
            (
                chance.randbytes(1),
                chance.randbytes(8),
                b"\xff" * 8,
                b"\0" * 8,
                struct.pack("<Q", 2 ** chance.randrange(64)),
            )
        )
        data[at : at + len(new)] = new
    path.write_bytes(data)


def cut(chance, path):
    """The end is missing, or a piece in the middle."""
    data = path.read_bytes()
    first = chance.randrange(len(data) + 1)
    path.write_bytes(data[:first] + chance.choice((b"", data[first + chance.randrange(64) :])))


def stretched(chance, path):
    """A piece comes twice, or there is a hole of up to 8 GB."""
    data = path.read_bytes()
    if chance.random() < 0.7:
        first, last = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
        path.write_bytes(data[:last] + data[first:])
    else:
        with path.open("r+b") as file:
            file.truncate(2 ** chance.randrange(20, 34))


def links(chance, path):
    """It is something else than a file with data. Keras reads a pipe or a device as every program does: to its end."""
    path.unlink()
    kind = chance.randrange(5)
    if kind == 0 and path.suffix not in (".h5", ".keras"):
        os.mkfifo(path)
    elif kind < 2:
        path.mkdir()
    else:
        device = "/etc/passwd" if path.suffix in (".h5", ".keras") else "/dev/zero"
        path.symlink_to((device, "/etc/passwd", path)[kind - 2])


def json_changed(chance, path):
    """A value, or a name, is a hostile one."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    path.write_text(many_lists(chance) or hostile_json(chance, value))


def many_lists(chance):
    """At times, JSON of a few bytes per value, each of which takes many times its bytes in the memory."""
    values = ("[],", "{},", "[" * 100 + "]" * 100 + ",", '{"":0},', '"ab",')
    text = chance.choice(values) if chance.random() < 0.1 else ""
    return f"[{text * (12_000_000 // len(text))}0]" if text else ""


def hostile_json(chance, value):
    """A document in which some value, at any depth, is another one."""
    if chance.random() < 0.05:
        return "[" * 100_000 + "]" * 100_000
    if chance.random() < 0.05:
        return json.dumps({f"n{number}": value for number in range(2000)})
    return json.dumps(with_another_value(chance, value))


def with_another_value(chance, value):
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(sorted(value))
        deed, rest = chance.random(), {key: x for key, x in value.items() if key != name}
        if deed < 0.1:
            return rest
        if deed < 0.25:
            return rest | {str(chance.choice(HOSTILE)): value[name]}
        return value | {name: with_another_value(chance, value[name])}
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        return [*value[:at], with_another_value(chance, value[at]), *value[at + 1 :]]
    if isinstance(value, str) and value[:1] in ("{", "["):
        return hostile_json(chance, json.loads(value)) if _is_json(value) else value
    return chance.choice((*HOSTILE, keras_lambda()))


def _is_json(text):
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def header_changed(chance, path):
    """The header of a file of safetensors says something else; at times it is longer than the file."""
    data = path.read_bytes()
    if len(data) < 8:
        return
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError):
        return
    text = (many_lists(chance) or hostile_json(chance, header)).encode()
    told = len(text) if chance.random() < 0.9 else 2 ** chance.randrange(64)
    path.write_bytes(struct.pack("<Q", told) + text + data[8 + size :])


def zip_changed(chance, path):
    """A member says something else, or is named like a file elsewhere. Keras unpacks one that expands without asking."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, NotImplementedError):
        return
    if not members:
        return
    name, deed = chance.choice(sorted(members)), chance.random()
    if name.endswith(".json") and deed < 0.75 and _is_json(members[name]):
        members[name] = hostile_json(chance, json.loads(members[name])).encode()
    elif deed < 0.8:
        members[chance.choice(("../../outside", "/tmp/outside", "assets/../../outside"))] = members[name]
    else:
        at = chance.randrange(len(members[name]) + 1)
        members[name] = members[name][:at] + chance.randbytes(8) + members[name][at + 8 :]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for member, data in members.items():
            archive.writestr(member, data)


# ---- What reads them.

EXECUTIONS = re.compile(
    r"^(subprocess\.Popen|os\.(system|exec|posix_spawn|fork|forkpty|startfile)|pickle\.find_class|ctypes\.dlopen)$"
)
CHANGES = re.compile(r"^(os\.(remove|rename|rmdir|mkdir|link|symlink|truncate|chmod|chown)|shutil\..*)$")


class Guard:
    """Notes what this process executes, and what it writes outside of a folder, as Python's audit hooks see it."""

    def __init__(self):
        self.folder, self.noted = None, []
        sys.addaudithook(self.hear)

    def hear(self, event, words):
        if self.folder is None:
            return
        writes = (
            event == "open" and isinstance(words[0], (str, bytes)) and words[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if EXECUTIONS.match(event) or (writes or CHANGES.match(event)) and not self.is_inside(words[0]):
            self.noted.append(f"{event} {words}"[:200])

    def is_inside(self, path):
        if not isinstance(path, (str, bytes, os.PathLike)):
            return True
        # A name alone is one in a folder that is open: shutil.rmtree removes its entries so.
        folder = os.path.dirname(os.fsdecode(path))
        return not folder or os.path.realpath(folder).startswith((str(self.folder), "/proc/self"))


def readers(good):
    """What reads each kind of file."""
    import keras
    import numpy as np

    import phalanx
    import phalanx.estimator as estimator
    from phalanx.summary.events import scalars_in

    strategy = phalanx.MirroredStrategy()
    with strategy.scope():
        model = network()

    def checkpoint(path):
        prefix = str(path).removesuffix(".safetensors")
        reader = phalanx.train.load_checkpoint(prefix)
        for name in list(reader.get_variable_to_shape_map())[:5]:
            reader.get_tensor(name)
        phalanx.train.Checkpoint(w=keras.Variable(np.ones(2, "float32")), n=3, m=network()).read(prefix)

    def summaries(path):
        scalars_in(str(path))

    def weights(path):
        model.load_weights(str(path))

    def load(path):
        with strategy.scope():
            keras.saving.load_model(str(path))

    def export(path):
        estimator.load_saved_model(path).predict({"x": np.ones(2, "float32")})

    return {"checkpoint": checkpoint, "export": export, "weights": weights, "model": load, "summaries": summaries}


def network():
    import keras

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="a"), keras.layers.Dense(1, name="b")])


def memory(field):
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def size_on_disk(path):
    """The bytes that the file really has: a hole has none."""
    files = [path] if not path.is_dir() else path.rglob("*")
    return sum(file.lstat().st_blocks * 512 for file in files)


def main(folder, first, last):
    good = Path(folder) / "good"
    # A reader that never ends must not take the memory of the machine.
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    read, guard = readers(good), Guard()
    for kind in KINDS:
        (path,) = good.glob(f"{kind}*")
        read[kind](path)  # All is imported, and the good file is read without an error.
    # What a reader writes for itself is beside the file.
    home = Path(folder) / "outside" / "in" / "here"
    (home.parent / "temporary").mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(home.parent / "temporary")
    for number in range(first, last):
        kind = KINDS[number % len(KINDS)]
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        path = made_from(good, kind, number, home)
        print(json.dumps({"number": number, "kind": kind}), flush=True)
        size, before = size_on_disk(path), memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        faulthandler.dump_traceback_later(FILE_S, exit=True)
        guard.folder, guard.noted = home.parent, []
        try:
            read[kind](path)
            said = "read"
        except Exception as e:
            said = f"{type(e).__module__}.{type(e).__name__}: {e}"[:400]
        guard.folder = None
        faulthandler.cancel_dump_traceback_later()
        grown = memory("VmHWM") - before
        result = {"number": number, "kind": kind, "said": said, "size": size, "grown": grown, "noted": guard.noted}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

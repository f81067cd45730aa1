"""Values of TensorFlow and NumPy as plain data that JSON can hold."""

import re

import numpy as np


def plain(value):
    """Returns a value as numbers, strings, lists and dictionaries; a float32 is written with its shortest digits."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return scalar(value[()]) if value.ndim == 0 else [plain(item) for item in value]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return scalar(value)


def scalar(value):
    if isinstance(value, (np.float32, np.float64)):
        return float(str(value))
    if isinstance(value, np.generic):
        return plain(value.item())
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def array(value):
    value = np.asarray(value)
    dtype = "string" if value.dtype.kind in "OSU" else value.dtype.name
    return {"dtype": dtype, "shape": list(value.shape), "values": plain(value)}


def arrays(values):
    return {name: array(value) for name, value in values.items()}


def failure(error):
    """Returns an exception: its type, its bases and the start of its message."""
    bases = [kind.__name__ for kind in type(error).__mro__[1:] if kind not in (object, BaseException)]
    return {"exception": type(error).__name__, "bases": bases, "message": message_of(error)[:200]}


def message_of(error):
    """Returns the message of an exception without stack traces and without names of folders."""
    text = re.sub(r"^Graph execution error:.*?\nNode: '[^']*'\n", "", str(error), flags=re.DOTALL)
    text = re.sub(r"\n\t? *\[\[.*", "", text, flags=re.DOTALL)
    return shortened(text)


def shortened(text):
    """Returns a text without the names of folders and without addresses."""
    return re.sub(r"0x[0-9a-f]{6,}", "ADDRESS", re.sub(r"/tmp/\w+", "FOLDER", text))


def described(case, *names):
    """Returns the description of a case: the entries that are not TensorFlow's answers."""
    return {name: value for name, value in case.items() if name in names}


def attempt(action):
    """Returns what an action returns, or the record of its exception."""
    try:
        return action()
    except Exception as error:  # whatever TensorFlow raises is the record
        return failure(error)

"""A store on the disk, which several processes can use: `store:///folder`. Unlike a disk, it has no locks, links or unfinished files."""

import os
import uuid

import fsspec
from fsspec.implementations.local import LocalFileSystem
from upath import UPath
from upath.registry import register_implementation


class StorePath(UPath):
    pass


class Store(LocalFileSystem):
    protocol = "store"

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)

    # What each call raises, by its name.
    failures = {}

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("store://"))

    def put_file(self, path1, path2, **options):
        """Shows the file when it is complete, as stores do."""
        unfinished = f"{path2}.{uuid.uuid4().hex}"
        super().put_file(path1, unfinished, **options)
        os.replace(self._strip_protocol(unfinished), self._strip_protocol(path2))

    def __getattribute__(self, name):
        failures = object.__getattribute__(self, "failures")
        if name in failures:
            raise failures[name]
        return super().__getattribute__(name)


fsspec.register_implementation("store", Store, clobber=True)
register_implementation("store", StorePath, clobber=True)

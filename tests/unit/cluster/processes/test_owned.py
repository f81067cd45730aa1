"""What processes of Ray get from the process that starts them."""

import os
import sys

import pytest

from phalanx._src.cluster.processes.owned import job_of_ray

ray = pytest.importorskip("ray")


@pytest.mark.parametrize(("first", "is_there"), [("", True), (os.getcwd(), True), ("/script", False)])
def test_processes_import_from_the_same_folders(monkeypatch, first, is_there):
    """The current folder is one of them for a module and at a prompt, and not for a script in another folder."""
    monkeypatch.setattr(sys, "path", [first, *(p for p in sys.path if os.path.abspath(p) != os.getcwd())])
    job = job_of_ray(ray)
    job._py_driver_sys_path.extend(["/script", os.getcwd()])  # As Ray does.
    assert (os.getcwd() in job._py_driver_sys_path) == is_there
    assert ("/script" in job._py_driver_sys_path) != is_there

import errno
import os

import pytest
from safetensors import SafetensorError

from tba.errors import ConfigError, StorageError
from tba.run.durable import new_folder, replace_file, storage_errors


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
    ],
)
def test_a_full_disk_is_named_whoever_met_it(error):
    with (
        pytest.raises(StorageError, match=r"^a could not be written \(the disk is full\)") as info,
        storage_errors("a"),
    ):
        raise error
    assert info.value.__cause__ is error


def test_other_refusals_give_the_system_s_reason():
    with pytest.raises(StorageError, match=r"\(Permission denied\).*: repair"), storage_errors("a"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_other_errors_pass_through():
    with pytest.raises(KeyError), storage_errors("a"):
        raise KeyError("b")


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    replace_file(path, [b"old"])

    def broken():
        yield b"ne"
        raise KeyError

    with pytest.raises(KeyError):
        replace_file(path, broken())
    assert path.read_bytes() == b"old"
    replace_file(path, [b"ne", b"w"])
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_new_folder_is_whole_or_is_not_there(tmp_path):
    out = tmp_path / "deep" / "model"
    stale = tmp_path / "deep" / "model.unfinished"
    stale.mkdir(parents=True)
    (stale / "junk").touch()

    def interrupted():
        with new_folder(out, "model") as folder:
            (folder / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(out.parent.iterdir()) == []
    with new_folder(out, "model") as folder:
        (folder / "whole").touch()
        assert not out.exists()
    assert [file.name for file in out.iterdir()] == ["whole"]
    assert list(out.parent.iterdir()) == [out]


def test_a_new_folder_that_cannot_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"model .*out cannot be made \(Not a directory\): name"),
        new_folder(tmp_path / "file" / "out", "model"),
    ):
        pytest.fail("the block was entered")

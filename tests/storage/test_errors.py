import errno

import pytest

from llmtrain.storage import errors


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("LlmtrainError", 70),
        ("UsageError", 2),
        ("BadData", 65),
        ("InputMissing", 66),
        ("InternalError", 70),
        ("HardwareFault", 71),
        ("CannotCreate", 73),
        ("StorageFailure", 74),
        ("StopRequested", 75),
        ("ConfigMismatch", 78),
        ("Diverged", 79),
    ],
)
def test_every_error_has_the_exit_code_of_the_contract_and_says_its_line(name: str, code: int):
    error = getattr(errors, name)("x.u16: is torn: make it again")
    assert isinstance(error, errors.LlmtrainError)
    assert (error.exit_code, str(error)) == (code, "x.u16: is torn: make it again")


@pytest.mark.parametrize("number", [*sorted(errno.errorcode), 99999])
def test_every_os_error_becomes_one_line_that_names_the_path(number: int):
    for translate in (errors.write_error, errors.read_error):
        error = translate(OSError(number, errno.errorcode.get(number, "?")), "some/where.bin")
        assert str(error).startswith("some/where.bin: ") and "\n" not in str(error)
        assert error.exit_code in (66, 73, 74)


@pytest.mark.parametrize(
    ("number", "write", "read"),
    [
        (errno.ENOENT, 73, 66),
        (errno.EACCES, 73, 66),
        (errno.EISDIR, 73, 66),
        (errno.EROFS, 73, 74),
        (errno.ENOSPC, 74, 74),
        (errno.EDQUOT, 74, 74),
        (errno.EIO, 74, 74),
    ],
)
def test_os_errors_end_in_the_codes_of_the_contract(number: int, write: int, read: int):
    error = OSError(number, "reason")
    assert errors.write_error(error, "x").exit_code == write
    assert errors.read_error(error, "x").exit_code == read

"""Run as a program: copies a staged bundle into the bundle directory, whole or not at all. Standard library only.

``copier.py STAGED DIRECTORY NAME KEEP ARCHIVE_S`` writes the final path and a NUL byte to stdout as soon as the bundle
is there. Then, where KEEP is not 0, all but the KEEP newest bundles are removed; where ARCHIVE_S is not 0, an archive
is written beside, in at most so many seconds. What goes wrong with these two follows the NUL byte, a line each.

It is a process of its own so that it can be given up when the directory is on a disk that does not answer.
"""

import os
import re
import shutil
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

BUNDLE = re.compile(r".+-(?P<time>\d{8}T\d{6}Z)-(?:hang|crash|dump)(?:-(?P<number>\d{1,3}))?")
STALE_S = 24 * 3600
WHOLE = ("verdict.json", "manifest.json")


def main(staged: str, directory: str, name: str, keep: str, archive_s: str) -> int:
    """Publishes one bundle; 1, with the reason on stderr, when it could not be."""
    partial = os.path.join(directory, f".{name}.{os.getpid()}-{time.time_ns()}.partial")
    parent = os.getppid()
    try:
        os.makedirs(directory, mode=0o755, exist_ok=True)
        os.umask(0o077)
        os.mkdir(partial, 0o700)
        shutil.copytree(staged, partial, copy_function=shutil.copyfile, dirs_exist_ok=True)
        for folder, _, files in os.walk(partial):
            os.chmod(folder, 0o700)
            for file in files:
                os.chmod(os.path.join(folder, file), 0o600)
        if os.getppid() != parent:  # and with safelaunch goes what it had staged, perhaps while we copied it
            raise OSError(None, "safelaunch was killed")
        if _files(partial) != _files(staged):
            raise OSError(None, "what had been written was removed meanwhile")
        final = _rename(partial, os.path.join(directory, name))
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        print(f"{directory}: {error.strerror or error}", file=sys.stderr)
        return 1
    _link_latest(directory, os.path.basename(final))
    sys.stdout.buffer.write(os.fsencode(final) + b"\0")
    sys.stdout.buffer.flush()
    _report("what a copy has left is still there", lambda: _remove_stale(directory))
    if float(archive_s):
        _report("no archive of the bundle", lambda: _archive(final, time.monotonic() + float(archive_s)))
    if int(keep):
        _report("old bundles are still there", lambda: _remove_old(directory, int(keep), os.path.basename(final)))
    return 0


def _files(root: str) -> "list[str]":
    return sorted(
        os.path.relpath(os.path.join(folder, file), root) for folder, _, files in os.walk(root) for file in files
    )


def _rename(partial: str, wanted: str) -> str:
    """Renames to ``wanted``, or to ``wanted-2``, ... where another run has taken that name."""
    for number in range(1, 1000):
        final = wanted if number == 1 else f"{wanted}-{number}"
        try:
            os.mkdir(final, 0o700)  # reserves the name: rename would replace another's empty directory only
        except FileExistsError:
            continue
        try:
            os.rename(partial, final)
        except OSError:
            os.rmdir(final)
            raise
        return final
    raise FileExistsError(f"{wanted} exists a thousand times")


def _link_latest(directory: str, name: str) -> None:
    link = os.path.join(directory, "latest")
    partial = os.path.join(directory, f".latest.{os.getpid()}-{time.time_ns()}")
    if os.path.lexists(link) and not os.path.islink(link):
        return  # somebody's own file or folder of that name stays
    try:
        os.symlink(name, partial)
        os.replace(partial, link)
    except OSError:
        return  # a disk without links: the bundle itself is there


def _remove_stale(directory: str) -> None:
    """Copies that were given up on a dead disk and could not be removed then: ours, and older than a day."""
    for entry in list(os.scandir(directory)):
        if not (entry.name.startswith(".") and entry.name.endswith(".partial")):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < STALE_S:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
        except FileNotFoundError:
            continue  # its own copy has just ended, and that is no leftover


def _report(what: str, work: "Callable[[], None]") -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the bundle is there; its copy and the room that it takes are not worth more
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        sys.stdout.buffer.write(f"{what}: {reason}\n".encode("utf-8", "replace"))


# --- the archive ------------------------------------------------------------------------------------------------------


def _archive(bundle: str, deadline_s: float) -> None:
    """``<bundle>.tar.gz``: relative names, nobody's files; whole or not at all, and never in place of another's."""
    import tarfile

    def anonymous(member: tarfile.TarInfo) -> "tarfile.TarInfo | None":
        if time.monotonic() > deadline_s:
            raise TimeoutError(None, "there was no time left to write it")
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member if member.isreg() or member.isdir() else None

    final = f"{bundle}.tar.gz"
    directory, name = os.path.split(bundle)
    partial = os.path.join(directory, f".{name}.tar.gz.{os.getpid()}-{time.time_ns()}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6, format=tarfile.PAX_FORMAT) as tar:
                tar.add(bundle, arcname=name, filter=anonymous)
        os.close(os.open(final, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # reserves the name
        os.replace(partial, final)
    except BaseException:
        try:
            os.unlink(partial)
        except OSError:
            pass
        raise


# --- retention --------------------------------------------------------------------------------------------------------


def _remove_old(directory: str, keep: int, just_written: str) -> None:
    """Removes all but the ``keep`` newest bundles of this user; never the new one, nor that which ``latest`` names."""
    names = sorted((name for name in os.listdir(directory) if _is_bundle(directory, name)), key=_age)
    try:
        spared = {just_written, os.path.basename(os.readlink(os.path.join(directory, "latest")))}
    except OSError:
        spared = {just_written}
    for name in names[: max(0, len(names) - keep)]:
        if name not in spared:
            _remove(directory, name)


def _is_bundle(directory: str, name: str) -> bool:
    """A directory, not a link to one, named as we name them, whole, and of this user."""
    path = os.path.join(directory, name)
    try:
        info = os.lstat(path)
        files = [os.lstat(os.path.join(path, file)) for file in WHOLE]
    except OSError:
        return False
    ours = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not name.startswith(".")
    return ours and bool(BUNDLE.fullmatch(name)) and all(stat.S_ISREG(file.st_mode) for file in files)


def _age(name: str) -> tuple[str, int]:
    match = BUNDLE.fullmatch(name)
    assert match is not None
    return match["time"], int(match["number"] or 1)


def _remove(directory: str, name: str) -> None:
    """First renamed, so that nobody finds half of it. ``rmtree`` follows no links."""
    path = os.path.join(directory, name)
    doomed = os.path.join(directory, f".{name}.{os.getpid()}-{time.time_ns()}.removed")
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return  # another run was faster
    shutil.rmtree(doomed)
    try:
        if stat.S_ISREG(os.lstat(f"{path}.tar.gz").st_mode):
            os.unlink(f"{path}.tar.gz")
    except FileNotFoundError:
        pass


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Copies a staged bundle into the bundle directory, atomically, with only the standard library.

``copier.py STAGED DIRECTORY NAME KEEP`` writes the final path and a NUL byte to stdout as soon as the bundle is in
place. Then it removes all but the KEEP newest bundles, unless KEEP is 0. It writes problems with this removal and with
the link ``latest`` to stdout, one per line.

It is a separate process, so that the supervisor can abandon it if the disk doesn't respond. It makes the directory its
working directory, so renaming the directory doesn't redirect its files. Users with write access (a project's group) can
also rename files, so at the end it checks what the names refer to.
"""

import errno
import os
import re
import shutil
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

BUNDLE = re.compile(r".+-(?P<time>\d{8}T\d{6}Z)-(?P<outcome>hang|suspect|crash|dump|slow)(?:-(?P<number>\d{1,3}))?")
STALE_S = 24 * 3600
REPLACED = "another user who may write there has replaced the bundle"
WHOLE = ("verdict.json", "manifest.json")
LATEST = "latest"


def main(staged: str, directory: str, name: str, keep: str, whole: str = "") -> int:
    """Publishes one bundle. Returns 1, with the reason on stderr, if that fails.

    ``whole`` is the name of a bundle that includes this one. If present, that bundle becomes ``latest``.
    """
    directory = os.path.abspath(directory)
    partial = f".{name}.{os.getpid()}-{time.time_ns()}.partial"
    written = -1
    parent = os.getppid()
    try:
        staged = f"/proc/self/fd/{_open(staged)}"  # this process might have no access to it by name
        _make_directory(directory)
        os.chdir(directory)
        if reason := why_unsafe(os.stat(".")):
            raise OSError(None, reason)
        os.umask(0o077)
        os.mkdir(partial, 0o700)
        written = _open_new(partial, _owner_of_what_is_made())
        _inside(written, lambda: _copy(staged, parent))
        final = _rename(partial, name)
        if not (_is(final, os.fstat(written)) and _is(os.path.realpath(directory), os.stat("."))):
            raise OSError(None, REPLACED)
    except OSError as error:
        if written >= 0:
            _remove_directory(partial, written)
        print(f"{directory}: {error.strerror or error}", file=sys.stderr)
        return 1
    note = _link_latest(whole if whole and os.path.isdir(whole) else final)
    sys.stdout.buffer.write(os.fsencode(os.path.join(directory, final)) + b"\0" + note.encode())
    sys.stdout.buffer.flush()
    _report("the remains of an earlier copy could not be removed", lambda: _remove_stale("."))
    if int(keep):
        _report("old bundles could not be removed", lambda: _remove_old(int(keep), final))
    return 0


def _make_directory(directory: str) -> None:
    try:
        os.makedirs(directory, mode=0o755, exist_ok=True)
    except (FileExistsError, NotADirectoryError, FileNotFoundError):
        while directory != os.path.dirname(directory):
            if os.path.lexists(directory) and not os.path.isdir(directory):
                raise OSError(None, what_is_in_the_way(directory)) from None
            directory = os.path.dirname(directory)
        raise


def what_is_in_the_way(path: str) -> str:
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode) and not os.path.exists(path):
        target = os.readlink(path)
        if len(target) > 200:
            return f"{path} is a link that leads nowhere: remove it, or choose another --bundle-dir"
        return f"{path} is a link to {target}, which does not exist: create {target} or remove the link"
    mode = os.stat(path).st_mode
    kinds = {stat.S_IFREG: "a file", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(mode), "a device")
    return f"{path} is {kind}, not a directory: move it away, or choose another --bundle-dir"


def why_unsafe(directory: os.stat_result) -> str:
    """Returns why any user could replace a bundle in this directory; empty if only the owner or the group can."""
    if not directory.st_mode & stat.S_IWOTH:
        return ""
    if not directory.st_mode & stat.S_ISVTX:
        return f"every user may replace files in it (mode {stat.S_IMODE(directory.st_mode):o})"
    if directory.st_uid not in (0, os.geteuid()):
        return f"every user may write to it, and its owner, user {directory.st_uid}, may replace files in it"
    return ""


def _owner_of_what_is_made() -> int:
    """Returns the owner of files created here. It might not be this user, because some network disks change it.

    Examines an open file, because an open file can't be swapped for another one.
    """
    name = f".{os.getpid()}-{time.time_ns()}.owner"
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        try:
            os.unlink(name)
        except OSError:
            pass


def _open_new(name: str, uid: int) -> int:
    """Opens a directory that this process, running as ``uid``, has just created; raises OSError if it was replaced."""
    try:
        descriptor = _open(name)
    except OSError as error:
        raise OSError(None, REPLACED) from error
    if os.fstat(descriptor).st_uid != uid:
        os.close(descriptor)
        raise OSError(None, REPLACED)
    return descriptor


def _open(name: str) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is(name: str, expected: os.stat_result) -> bool:
    try:
        status = os.stat(name, follow_symlinks=False)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (expected.st_dev, expected.st_ino)


def _inside(directory: int, work: "Callable[[], None]") -> None:
    previous = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fchdir(directory)
        work()
    finally:
        os.fchdir(previous)
        os.close(previous)


def _copy(staged: str, parent: int) -> None:
    os.chmod(".", 0o700)
    copy_tree(staged, ".")
    if os.getppid() != parent:  # then the staged files disappear, perhaps during the copy
        raise OSError(None, "safelaunch was killed")
    if not _files(staged) or _files(".") != _files(staged):
        raise OSError(None, "the staged bundle was removed during the copy")


def copy_tree(source: str, target: str) -> None:
    """Copies the files below ``source`` into ``target``. The copies are private despite umask and ACLs.

    Raises the first OSError, with a one-line message.
    """
    for folder, folders, files in os.walk(source):
        subfolder = os.path.join(target, folder[len(source) + 1 :])
        for name in folders:
            destination = os.path.join(subfolder, name)
            os.mkdir(destination, 0o700)
            os.chmod(destination, 0o700)
        for name in files:
            destination = os.path.join(subfolder, name)
            shutil.copyfile(os.path.join(folder, name), destination, follow_symlinks=False)
            os.chmod(destination, 0o600)


def _remove_directory(name: str, descriptor: int) -> None:
    """Empties the open directory ``descriptor``, then removes it if ``name`` still refers to it. Ignores failures."""

    def empty() -> None:
        for entry in list(os.scandir(".")):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.name, ignore_errors=True)
            else:
                os.unlink(entry.name)

    try:
        _inside(descriptor, empty)
        if _is(name, os.fstat(descriptor)):
            os.rmdir(name)
    except OSError:
        return


def _files(root: str) -> "list[str]":
    # Relative paths, because ``root`` might be renamed now.
    return sorted(os.path.join(folder, file)[len(root) + 1 :] for folder, _, files in os.walk(root) for file in files)


def _rename(partial: str, wanted: str) -> str:
    for number in range(1, 1000):
        final = wanted if number == 1 else f"{wanted}-{number}"
        try:
            os.mkdir(final, 0o700)  # reserves the name: rename can only replace an empty directory
        except FileExistsError:
            continue
        try:
            os.rename(partial, final)
        except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
            raise OSError(None, REPLACED) from error
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                raise OSError(None, REPLACED) from error
            os.rmdir(final)
            raise
        return final
    raise FileExistsError(f"{wanted} and a thousand numbered names exist already")


def _link_latest(name: str) -> str:
    if os.path.lexists(LATEST) and not os.path.islink(LATEST) and not _is_set_aside(LATEST):
        return f"{LATEST} is not safelaunch's: there is no link to the newest bundle\n"
    partial = f".latest.{os.getpid()}-{time.time_ns()}"
    try:
        os.symlink(name, partial)
    except OSError:
        return ""  # the disk has no links, but the bundle is in place
    try:
        os.replace(partial, LATEST)
    except OSError as error:  # another user's file, protected by the sticky bit
        os.unlink(partial)
        return f"no link to the newest bundle: {LATEST}: {error.strerror}\n"
    return ""


def _is_set_aside(name: str) -> bool:
    """Moves a file of that name aside if it is another user's. Returns whether the name is free."""
    owner = os.lstat(name).st_uid
    if owner == os.geteuid():
        return False
    try:
        os.rename(name, f"{name}.of-user-{owner}-{time.time_ns()}")
    except OSError:
        return False  # protected by the sticky bit
    return True


def is_ours_alone(directory: os.stat_result) -> bool:
    """Returns whether only this user can rename files in it.

    If others can, any name might refer to any of our directories.
    """
    shared = directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not directory.st_mode & stat.S_ISVTX
    return directory.st_uid in (0, os.geteuid()) and not shared


def _remove_stale(directory: str) -> None:
    """Removes this user's incomplete copies of more than a day ago, which remain if a disk stopped responding."""
    if not is_ours_alone(os.stat(directory)):
        return
    for entry in list(os.scandir(directory)):
        if not (entry.name.startswith(".") and entry.name.endswith(".partial")):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < STALE_S:
                continue
            shutil.rmtree(entry.path, ignore_errors=True)
        except FileNotFoundError:
            continue


def _report(what: str, work: "Callable[[], None]") -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the bundle is in place; retention is best effort
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        sys.stdout.buffer.write(f"{what}: {reason}\n".encode("utf-8", "replace"))


# --- retention --------------------------------------------------------------------------------------------------------


def _remove_old(keep: int, just_written: str) -> None:
    """Removes all but the ``keep`` newest bundles of this user, but never the new one or the target of ``LATEST``.

    Bundles of slow ranks and all others are counted separately: a slow rank must not cost the evidence of a hang.
    """
    names = sorted((name for name in os.listdir(".") if _is_bundle(name)), key=_age)
    names = [name for name in names if _is_slow(name) == _is_slow(just_written)]
    spared = {just_written}
    if os.path.islink(LATEST):
        spared.add(os.path.basename(os.readlink(LATEST)))
    for name in names[: max(0, len(names) - keep)]:
        if name not in spared:
            _remove(name)


def _is_slow(name: str) -> bool:
    match = BUNDLE.fullmatch(name)
    return match is not None and match["outcome"] == "slow"


def _is_bundle(name: str) -> bool:
    """Returns whether ``name`` is a complete bundle of this user, not a link to one."""
    try:
        info = os.lstat(name)
        files = [os.lstat(os.path.join(name, file)) for file in WHOLE]
    except OSError:
        return False
    ours = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not name.startswith(".")
    return ours and bool(BUNDLE.fullmatch(name)) and all(stat.S_ISREG(file.st_mode) for file in files)


def _age(name: str) -> tuple[str, int]:
    match = BUNDLE.fullmatch(name)
    assert match is not None
    return match["time"], int(match["number"] or 1)


def _remove(name: str) -> None:
    """Renames a bundle before removing it, so that no incomplete bundle is visible."""
    doomed = f".{name}.{os.getpid()}-{time.time_ns()}.removed"
    try:
        bundle = _open(name)
    except FileNotFoundError:
        return
    try:
        if not _is_bundle(name) or not _is(name, os.fstat(bundle)):
            return
        os.rename(name, doomed)
        _remove_directory(doomed, bundle)
        if os.path.lexists(doomed):
            raise OSError(None, f"{doomed} could not be removed")
    except FileNotFoundError:
        return
    finally:
        os.close(bundle)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

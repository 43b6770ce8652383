"""Run as a program: copies a staged bundle into the bundle directory, whole or not at all. Standard library only.

``publish.py STAGED DIRECTORY NAME`` prints the final path. It is a process of its own so that it can be given up when
the directory is on a disk that does not answer.
"""

import os
import shutil
import sys


def main(staged: str, directory: str, name: str) -> int:
    partial = os.path.join(directory, f".{name}.{os.getpid()}.partial")
    try:
        os.makedirs(directory, mode=0o755, exist_ok=True)
        shutil.copytree(staged, partial, copy_function=shutil.copyfile)
        for folder, _, files in os.walk(partial):
            os.chmod(folder, 0o700)
            for file in files:
                os.chmod(os.path.join(folder, file), 0o600)
        final = _rename(partial, os.path.join(directory, name))
        _link_latest(directory, os.path.basename(final))
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        print(f"{directory}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(final)
    return 0


def _rename(partial: str, wanted: str) -> str:
    """Renames to ``wanted``, or to ``wanted-2``, ... where another run has taken that name."""
    for number in range(1, 1000):
        final = wanted if number == 1 else f"{wanted}-{number}"
        try:
            os.mkdir(final, 0o700)  # reserves the name: rename would replace another's empty directory only
            os.rename(partial, final)
        except FileExistsError:
            continue
        return final
    raise FileExistsError(f"{wanted} exists a thousand times")


def _link_latest(directory: str, name: str) -> None:
    link = os.path.join(directory, "latest")
    partial = f"{link}.{os.getpid()}"
    if os.path.lexists(link) and not os.path.islink(link):
        return  # somebody's own file or folder of that name stays
    try:
        os.symlink(name, partial)
        os.replace(partial, link)
    except OSError:
        return  # a disk without links: the bundle itself is there


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

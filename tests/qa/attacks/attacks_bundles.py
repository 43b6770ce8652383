"""Hostile bundles and archives: names, links, devices, sizes, numbers, bytes.

``diagnose`` must end soon, in little memory, with one of its exit codes, and with one clear line if it cannot read
PATH. It must leave no files, and its output must contain nothing of files outside PATH.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import pickle
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.qa.attacks.attack import Attack
from tests.qa.attacks.attacks_dumps import OPCODES, TEXTS, VALUES
from tests.qa.attacks.reader import diagnosed
from tests.support.bundles import ZEROS, dumps, hang, header, mismatching, sparse, write_bundle
from tests.support.sample_dumps import places

SECRET = "FROM-OUTSIDE"
_MB = 1 << 20
Make = Callable[[Path], Path]  # creates something in an existing directory and returns PATH


def attacks(count: int, random: Random) -> Iterator[Attack]:
    for name, make in {**FOLDERS, **ARCHIVES}.items():
        yield Attack(name, partial(_tried, make), needs=partial(_root_only, name))
    for number in range(count):
        seed = random.getrandbits(48)
        yield Attack(f"draw {number} (seed {seed})", partial(_drawn, seed))


def _root_only(name: str) -> str:
    return "only root makes devices" if "device" in name and os.geteuid() else ""


def _tried(make: Make, scratch: Path) -> str:
    place = scratch / "there"
    place.mkdir(mode=0o700)
    try:
        path = make(place)
        told = diagnosed(path, scratch)
        wrong = told.wrong()
        if not wrong and SECRET in told.out + told.err:
            wrong = "it followed a link out of PATH"
        return wrong
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)  # rmtree cannot remove 2000 levels


# --- folders ----------------------------------------------------------------------------------------------------------


def bundle(place: Path) -> Path:
    root = write_bundle(place / "b", hang())
    (root / "verdict.json").write_text('{"outcome": "hang"}')
    for number in range(4):
        (root / f"ranks/{number}/log_tail.txt").write_text("12:00:00.000 out| hello\n")
    return root


def changed(change: Callable[[Path], object], place: Path) -> Path:
    root = bundle(place)
    change(root)
    return root


def field(name: str, path: tuple[Any, ...], value: str) -> Make:
    """Puts ``value``, a JSON text, at ``path`` in the file ``name``."""

    def change(root: Path) -> None:
        file = root / name
        document = json.loads(file.read_text())
        inner = document
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = "@@"
        file.write_text(json.dumps(document).replace('"@@"', value))

    return partial(changed, change)


def linked(name: str, target: Callable[[Path], Path]) -> Make:
    """Makes ``name`` in a bundle a link to a place outside."""

    def change(root: Path) -> None:
        outside = target(root.parent)
        path = root / name
        if path.is_dir():
            path.rename(root.parent / "moved")
        else:
            path.unlink(missing_ok=True)
        path.symlink_to(outside)

    return partial(changed, change)


def outside_bundle(place: Path) -> Path:
    root = write_bundle(place / "outside", hang())
    for file in root.rglob("*.json"):
        file.write_text(file.read_text().replace("load", SECRET).replace("node1", SECRET))
    for number in range(4):
        (root / f"ranks/{number}/log_tail.txt").write_text(SECRET)
    return root


def outside_text(place: Path) -> Path:
    (place / "secret").write_text(json.dumps({"host": SECRET, "version": SECRET}))
    return place / "secret"


def special(name: str, make: Callable[[Path], object]) -> Make:
    def change(root: Path) -> None:
        (root / name).unlink(missing_ok=True)
        make(root / name)

    return partial(changed, change)


def deep(place: Path, levels: int = 2000) -> Path:
    root = bundle(place)
    descriptor = os.open(root / "ranks/0", os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("a", dir_fd=descriptor)
        inner = os.open("a", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    return root


def many(place: Path, count: int, name: str) -> Path:
    (place / "dumps").mkdir()
    for number in range(count):
        (place / "dumps" / name.format(number)).touch()
    return place / "dumps"


def linked_dumps(place: Path, target: str) -> Path:
    folder = dumps(place / "dumps", mismatching())
    outside = dumps(place / "outside", mismatching())
    (outside / "nccl_trace_rank_2").write_bytes(pickle.dumps({"version": SECRET, "entries": [{"state": SECRET}]}))
    (folder / "nccl_trace_rank_2").unlink()
    (folder / "nccl_trace_rank_2").symlink_to(target)
    return folder


def tall_stack(frames: int, place: Path) -> Path:
    root = bundle(place)
    for number in range(4):
        file = root / f"ranks/{number}/proc.json"
        document = json.loads(file.read_text())
        for sample in document["main"]["stacks"]:
            frame = {"file": "/home/me/train.py", "line": 3, "function": "again"}
            thread = sample["threads"][0]
            thread["frames"] = [*thread["frames"], *({**frame, "line": n % (7 + number)} for n in range(frames))]
        file.write_text(json.dumps(document))
    return root


def several(count: int, place: Path) -> Path:
    for number in range(count):
        write_bundle(place / f"train-node{number}", hang())
    return place


NAMES = ("manifest.json", "verdict.json", "ranks/1/rank.json", "ranks/1/progress.json", "ranks/1/proc.json",
         "ranks/1/log_tail.txt", "ranks/1/flight_recorder.pickle", "ranks/1/exception.json")  # fmt: skip

FOLDERS: dict[str, Make] = {
    **{f"a world of {size}": field("manifest.json", ("job", "world_size"), size)
       for size in ("2000000000", "2e9", "1e999", "-5", "65536", "99999999999999999999999", '"4"')},
    **{f"a rank's world of {size}": field("ranks/1/progress.json", ("world_size",), size)
       for size in ("2000000000", "18446744073709551615", "-1")},
    **{f"a folder ranks/{name!r}": partial(changed, lambda root, name=name: (root / "ranks" / name).mkdir())
       for name in ("999999999999", "²", "007", "-1", "65536", "65535", "٣", "1e9", "1\n2", "0x1", "9" * 250)},
    "thousands of ranks": partial(changed, lambda root: [(root / f"ranks/{n}").mkdir() for n in range(10, 20_000)]),
    "ranks is a file": partial(changed, lambda root: ((root / "ranks").rename(root / "x"), (root / "ranks").touch())),
    **{f"{name} is a FIFO": special(name, os.mkfifo) for name in NAMES},
    **{f"{name} is a device": special(name, lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5)))
       for name in NAMES},
    **{f"{name} has a terabyte": special(name, sparse) for name in NAMES},
    **{f"{name} has 200 MB": special(name, partial(sparse, size=200 * _MB)) for name in NAMES},
    **{f"{name} leads to a device": linked(name, lambda place: Path("/dev/zero")) for name in NAMES},
    **{f"{name} leads outside": linked(name, outside_text) for name in NAMES},
    **{f"{name} leads to another bundle's": linked(name, lambda place, name=name: outside_bundle(place) / name)
       for name in (*NAMES, "ranks", "ranks/1")},
    "ranks leads to itself": linked("ranks", lambda place: place / "b" / "ranks"),
    "a dump leads outside": partial(linked_dumps, target="../outside/nccl_trace_rank_2"),
    "a dump leads to a device": partial(linked_dumps, target="/dev/zero"),
    "2000 levels": deep,
    "many empty dumps": partial(many, count=20_000, name="nccl_trace_rank_{}"),
    "too many dumps": partial(many, count=140_000, name="a{0}_1"),
    "a stack of 100000 frames": partial(tall_stack, 100_000),
    "a stack of 3000 frames": partial(tall_stack, 3_000),
    "200 bundles": partial(several, 200),
}  # fmt: skip


# --- archives ---------------------------------------------------------------------------------------------------------


def archive(place: Path, *parts: bytes, ending: str = "tar.gz") -> Path:
    path = place / f"b.{ending}"
    path.write_bytes(b"".join(parts))
    return path


def announced(kind: bytes, megabytes: int, place: Path) -> Path:
    return archive(place, gzip.compress(header("x", megabytes * _MB, kind)), ZEROS * (megabytes // 16))


def unpacks_to(gigabytes: int, place: Path) -> Path:
    one = gzip.compress(header("b/ranks/0/log_tail.txt", 192 * _MB)), ZEROS * 12
    return archive(place, *one * (gigabytes * 5 + 1))


def of_members(change: Callable[[tarfile.TarFile], object], place: Path, mode: str = "w:gz") -> Path:
    root = bundle(place)
    path = place / f"b.tar.{mode[2:]}"
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        tar.add(root, "b")
        change(tar)
    return path


Change = Callable[[tarfile.TarFile], object]


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **more: Any) -> Change:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.size = kind, len(data)
        for key, value in more.items():
            setattr(info, key, value)
        tar.addfile(info, io.BytesIO(data))

    return add


def each(*changes: Change) -> Change:
    return lambda tar: [change(tar) for change in changes]


def links(tar: tarfile.TarFile) -> None:
    """Makes an archive with a link to an outside directory, and a file whose path goes through the link."""
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        member("b/ranks/1", kind, linkname="../../../outside")(tar)
        member("b/ranks/1/rank.json", data=b"{}")(tar)
        member("b/ranks/2/log_tail.txt", kind, linkname="/etc/passwd")(tar)


def pax_sparse(tar: tarfile.TarFile) -> None:
    pax = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 43),
           "GNU.sparse.name": "b/ranks/0/log_tail.txt"}  # fmt: skip
    member("b/ranks/0/x", data=b"1\n0\n1\n".ljust(1024, b"\0"), pax_headers=pax)(tar)


ARCHIVES: dict[str, Make] = {
    **{f"{name} header of {size} MB": partial(announced, kind, size)
       for name, kind in (("pax", tarfile.XHDTYPE), ("global pax", tarfile.XGLTYPE), ("unknown", b"~"),
                          ("long name", tarfile.GNUTYPE_LONGNAME), ("sparse", tarfile.GNUTYPE_SPARSE))
       for size in (160, 3200)},
    "unpacks to 3 GB": partial(unpacks_to, 3),
    "a member of 8 GB": lambda place: archive(place, gzip.compress(header("b/x", 8191 * _MB)), ZEROS * 500),
    "nothing but zeros, 8 GB": lambda place: archive(place, ZEROS * 500),
    "a pax name of 2000 levels": partial(of_members, member("/".join("a" * 2000), data=b"x")),
    "a name of 30 levels": partial(of_members, member("/".join("a" * 30), data=b"x")),
    "a name of 5000 letters": partial(of_members, member("b/" + "a" * 5000, data=b"x")),
    "names that lead out": partial(of_members, each(*(member(name, data=b"x") for name in (
        "../x", "/x", "b/../../x", "./../x", "b/ranks/../../../x", "..", "/", ".", "", "b", "b/", "//x", "C:\\x")))),
    "links": partial(of_members, links),
    "devices": partial(of_members, each(
        member("b/ranks/0/log_tail.txt", tarfile.CHRTYPE, devmajor=1, devminor=5),
        member("b/ranks/1/log_tail.txt", tarfile.BLKTYPE), member("b/ranks/2/rank.json", tarfile.FIFOTYPE))),
    "a file and a directory of one name": partial(of_members, each(
        member("b/ranks/0", data=b"x"), member("b/ranks/0/rank.json/x", data=b"x"), member("b/manifest.json/x"))),
    "the same member 3000 times": partial(of_members, each(*[member("b/ranks/0/rank.json", data=b"{}")] * 3000)),
    "200000 empty members": lambda place: archive(place, gzip.compress(header("b/x", 0) * 200_000)),
    "names that are no UTF-8": partial(of_members, member("b/ranks/\udcff\udcfe", data=b"x")),
    "controls in names": partial(of_members, member("nccl_trace_\x9b2J\x1b]0;x\x07_1", data=b"x")),
    "pax sparse": lambda place: of_members(pax_sparse, place),
    "a bundle of tar": partial(of_members, lambda tar: None, mode="w:"),
    "a bundle of bzip2": partial(of_members, lambda tar: None, mode="w:bz2"),
    "a bundle of xz": partial(of_members, lambda tar: None, mode="w:xz"),
    "xz of zeros": lambda place: archive(place, lzma.compress(header("b/x", 8000 * _MB)),
                                         lzma.compress(bytes(64 * _MB)) * 40, ending="tar.xz"),
    "a zip": lambda place: archive(place, b"PK\x03\x04" + bytes(500), ending="zip"),
    "an empty file": lambda place: archive(place),
}  # fmt: skip


# --- drawn ------------------------------------------------------------------------------------------------------------


def _drawn(seed: int, scratch: Path) -> str:
    random = Random(seed)
    name, make = random.choice((_damaged_field, _damaged_bytes, _damaged_archive))(random)
    wrong = _tried(make, scratch)
    return wrong and f"{name}: {wrong}"


def _damaged_field(random: Random) -> tuple[str, Make]:
    """Replaces a random value of a random record by one of the values that damage dumps."""
    file = random.choice([name for name in NAMES if name.endswith(".json") and "exception" not in name])
    texts = {name: json.dumps(value) for name, value in VALUES.items() if not isinstance(value, bytes)}
    kind, text = random.choice([*texts.items(), *((name, made().decode("latin-1")) for name, made in TEXTS.items())])

    def change(root: Path) -> None:
        document = json.loads((root / file).read_text())
        found = places(document)
        if not found:
            return
        *path, last = random.choice(found)
        inner = document
        for key in path:
            inner = inner[key]
        inner[last] = "@@"
        (root / file).write_bytes(json.dumps(document).replace('"@@"', text).encode("utf-8", "surrogatepass"))

    return f"{file}: {kind}", partial(changed, change)


def _damaged_bytes(random: Random) -> tuple[str, Make]:
    file = random.choice([name for name in NAMES if "exception" not in name])

    def change(root: Path) -> None:
        if random.random() < 0.3 and file.endswith("pickle"):
            (root / file).write_bytes(b"\x80\x02" + random.choice(list(OPCODES.values()))() + b".")
        else:
            (root / file).write_bytes(_mangled((root / file).read_bytes(), random))

    return file, partial(changed, change)


def _damaged_archive(random: Random) -> tuple[str, Make]:
    mode = random.choice(["w:gz", "w:", "w:bz2", "w:xz"])

    def make(place: Path) -> Path:
        path = of_members(lambda tar: None, place, mode)
        data = path.read_bytes()
        if mode == "w:gz" and random.random() < 0.7:
            data = gzip.compress(_mangled(gzip.decompress(data), random))
        else:
            data = _mangled(data, random)
        path.write_bytes(data)
        return path

    return f"archive {mode}", make


def _mangled(data: bytes, random: Random) -> bytes:
    made = bytearray(data or b"\0")
    for _ in range(random.choice([1, 3, 40])):
        at = random.randrange(len(made))
        way = random.randrange(4)
        if way == 0:
            made[at] = random.randrange(256)
        elif way == 1:
            made[at : at + random.choice([1, 8, 600])] = random.randbytes(random.choice([1, 8, 600]))
        elif way == 2:
            del made[at : at + random.choice([1, 20])]
        else:
            made[at : at + 12] = b"777777777777"
        made = made or bytearray(1)
    return bytes(made)

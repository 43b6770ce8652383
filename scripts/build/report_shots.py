"""Makes report pages of made-up incidents, or of bundles, and pictures of them: light, dark, phone, wide, print.

    python -m scripts.build.report_shots OUT [--only two,crash] [--bundle DIR ...] [--shots light,phone]

Needs Chromium. Prints what each page weighs, how long it took to make, when it was first painted, and its errors.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from safelaunch.bundle.reading import locate, report_header
from safelaunch.capture import user_source
from safelaunch.report import page, template
from safelaunch.verdict.diagnose import diagnose
from tests.support import incidents
from tests.support.browser import Browser, found

# name → width, dark, phone, printed
SHOTS = {
    "light": (1280, False, False, False),
    "dark": (1280, True, False, False),
    "phone": (390, False, True, False),
    "wide": (1920, False, False, False),
    "print": (794, False, False, True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--only", default=",".join(incidents.ALL), help="which of the made-up incidents; an empty text: none"
    )
    parser.add_argument("--bundle", type=Path, action="append", default=[], help="a bundle to make the page of")
    parser.add_argument("--shots", default=",".join(SHOTS))
    options = parser.parse_args()
    program = found()
    if program is None:
        print("no Chromium on this machine", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    made = [_made_up(name, options.out) for name in options.only.split(",") if name]
    made += [_of_bundle(path, options.out) for path in options.bundle]
    with Browser(program) as browser:
        for path in made:
            for name in options.shots.split(","):
                _shoot(browser, path, name)
    return 0


def _made_up(name: str, out: Path) -> Path:
    incident = incidents.ALL[name]()
    verdict, begin = incident.verdict, time.process_time()
    text = template.render(
        page.content(
            verdict, incident.evidence, incident.artifacts, read_source=incidents.read_source, about=incident.about
        )
    )
    return _written(out / f"{name}.html", text, begin)


def _of_bundle(path: Path, out: Path) -> Path:
    root = path.resolve()
    evidence = locate.read(root).evidence
    verdict, begin = diagnose(evidence, read_source=user_source.text_for_stranger), time.process_time()
    about = report_header.about(root)
    text = template.render(page.content(verdict, evidence, read_source=user_source.text_for_stranger, about=about))
    return _written(out / f"{root.name}.html", text, begin)


def _written(path: Path, text: str, begin: float) -> Path:
    taken = time.process_time() - begin
    path.write_text(text, encoding="utf-8")
    print(f"{path.name}: {len(text.encode()) / 1e6:.2f} MB, made in {taken:.2f} s of CPU time")
    return path


def _shoot(browser: Browser, path: Path, name: str) -> None:
    width, dark, phone, printed = SHOTS[name]
    browser.size(width, mobile=phone)
    browser.medium(dark=dark, printed=printed)
    browser.open(path)
    painted = browser.metrics().get("first-contentful-paint", 0.0)
    shown = browser.value("document.documentElement.scrollWidth")
    browser.shoot(path.with_name(f"{path.stem}-{name}.png"))
    wide = "" if shown <= width else f", {shown} px wide in {width}"
    print(f"{path.stem} {name}: painted after {painted:.0f} ms{wide}", *browser.errors, sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())

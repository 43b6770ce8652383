"""One rank calls native code that holds the GIL and never returns."""

import ctypes

from training import Training, parser

options = parser.parse_args()


def tokenize_natively() -> None:
    ctypes.PyDLL(None).sleep(86_400)  # HANGS: gil


def main() -> None:
    with Training(options) as job:
        for step, batch in job.batches():
            job.train(batch)
            if job.misbehaves(step):
                tokenize_natively()


if __name__ == "__main__":
    main()

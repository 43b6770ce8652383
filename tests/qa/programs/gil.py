"""One rank calls native code that holds the GIL and never returns."""

import ctypes

from training import parser, train_until

options = parser.parse_args()


def tokenize_natively() -> None:
    ctypes.PyDLL(None).sleep(86_400)  # HANGS: gil


if __name__ == "__main__":
    train_until(options, {"gil": tokenize_natively})

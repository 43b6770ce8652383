"""A TCPStore of torch's own, for as long as its parent lives: a program for the interpreter that has torch.

``python store_program.py HOST``; descriptor 3 listens already. It ends when stdin does, which the parent holds and never
writes to. This file is no part of the package that it lies in: it runs where safelaunch may not be installed.
"""

import os
import sys

LISTENING = 3


def main() -> None:
    """Serves until stdin ends. Nothing is unwound then: the server's threads may be at work."""
    import socket

    with socket.socket(fileno=os.dup(LISTENING)) as listening:
        port = listening.getsockname()[1]
    from torch.distributed import TCPStore

    given = {"is_master": True, "wait_for_workers": False, "master_listen_fd": LISTENING}
    try:
        store = TCPStore(sys.argv[1], port, **given)
    except NotImplementedError:  # up to torch 2.6, libuv's server takes no socket that listens already
        store = TCPStore(sys.argv[1], port, **given, use_libuv=False)
    while os.read(0, 4096):
        pass
    del store
    os._exit(0)


if __name__ == "__main__":
    del sys.path[0]  # the modules beside this one are none of torch's
    main()

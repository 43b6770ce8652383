"""Serves a TCPStore while its parent lives, in the interpreter that has torch: ``python store_program.py HOST``.

Descriptor 3 is already a listening socket. The program ends when stdin ends, which the parent holds open. safelaunch
might not be installed in that interpreter, so this file imports nothing from it.
"""

import os
import sys

LISTENING = 3


def main() -> None:
    """Serves until stdin ends. Exits without cleanup, because the server's threads might be busy."""
    import socket

    with socket.socket(fileno=os.dup(LISTENING)) as listening:
        port = listening.getsockname()[1]
    from torch.distributed import TCPStore

    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": LISTENING}
    try:
        store = TCPStore(sys.argv[1], port, **options)
    except NotImplementedError:  # up to torch 2.6, libuv's server can't adopt a listening socket
        store = TCPStore(sys.argv[1], port, **options, use_libuv=False)
    while os.read(0, 4096):
        pass
    del store
    os._exit(0)


if __name__ == "__main__":
    del sys.path[0]  # so that torch doesn't import modules from this folder
    main()

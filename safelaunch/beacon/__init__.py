"""The code that runs inside the job's own processes: the ranks and the torchrun agent.

It uses only the standard library and imports nothing else of safelaunch. ``inject/sitecustomize.py``, which is put on
``PYTHONPATH``, loads this package by its path as ``_safelaunch_beacon``: it works in interpreters without safelaunch,
too. The supervisor imports ``layout`` and ``output`` to read what the ranks write, and ``page.start_ticks``.

Most modules are one hook each. Unlike the rest of safelaunch, they rebind module globals: an interpreter installs each
hook once, the things that hooks replace are global themselves (``sys.excepthook``, ``os.close``), and a step mark must
cost well under a microsecond. A forked child removes the hooks with ``detach``.
"""

"""The code that runs inside the job's own processes: the ranks and the torchrun agent.

It uses the standard library only and imports nothing else of safelaunch. ``inject/sitecustomize.py`` is put on
``PYTHONPATH`` and loads this package by its path, under the private name ``_safelaunch_beacon``. So it also works in
interpreters where safelaunch is not installed. The supervisor imports ``layout`` and ``output`` to read what the
ranks write, and ``page.start_ticks``.

Most modules are one hook each. Unlike the rest of safelaunch, they rebind module globals: an interpreter installs each
hook once, what a hook replaces is global itself (``sys.excepthook``, ``os.close``), and a step mark must cost well
under a microsecond. A forked child removes the hooks with ``detach``.
"""

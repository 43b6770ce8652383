"""Code that runs inside the job's own processes: the ranks and the torchrun agent.

It uses only the standard library, because the interpreters of these processes might not have safelaunch.
``inject/sitecustomize.py``, which is on ``PYTHONPATH``, loads this package by its path as ``_safelaunch_beacon``. The
supervisor imports ``layout``, ``output`` and ``page.start_ticks``.

Most modules implement one hook each. Unlike other packages, they rebind module globals: an interpreter installs each
hook once, hooks replace globals (``sys.excepthook``, ``os.close``), and a step mark must cost well under a microsecond.
A forked child removes the hooks with ``detach``.
"""

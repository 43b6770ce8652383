"""What runs inside the job's own processes. Standard library only; imports nothing of the rest of safelaunch.

``inject/sitecustomize.py`` is put on ``PYTHONPATH`` and loads this package under the private name
``_safelaunch_beacon`` by its path, so that it works in interpreters where safelaunch is not installed.
``layout`` and ``ring`` are also imported by the supervisor, which reads what the others write.
"""

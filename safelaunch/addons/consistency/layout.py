"""Defines the files in which a rank passes its numbers to the supervisor: one per series, of signed 64-bit words.

- Header: CHECK_MAGIC (stored last), the length in bytes of the following JSON, the number of slots, and their size in
  words.
- JSON, padded to whole words: ``key``, ``kind`` ("parameters" or "buffers"), ``every``, ``rank``, ``groups`` (lists of
  ranks) and ``tensors`` (name, index of its group of replicas).
- Slots, used as a ring: sequence number (odd while the slot is written), position (steps), CLOCK_MONOTONIC, number of
  losses, step of the first loss, rounds (steps before which the ranks communicated; position also counts the steps
  since then), and the rank's own step number, which also numbers the sentinel's gradients.
- From word CHECK_SLOT of a slot: each tensor's fingerprint, each tensor's largest magnitude, each gradient's largest
  magnitude, CHECK_WINDOW largest magnitudes of the sentinel's local gradient by step, and the losses. Magnitudes and
  losses are float64.
"""

CHECK_MAGIC = 0x534146434B0001
CHECK_SUFFIX = ".check"
CHECK_OFF = ".check-off"  # empty file: an error has ended this rank's checks
CHECK_FULL = ".check-full"  # empty file: this rank trains more tensors than are checked
CHECK_LENGTH, CHECK_SLOTS, CHECK_SLOT_SIZE = 1, 2, 3
CHECK_HEADER = 4
CHECK_SLOT = 8
CHECK_WINDOW = 1024
VARIABLE = "SAFELAUNCH_CHECKS"  # number of steps between checks; set by the supervisor

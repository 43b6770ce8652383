"""Files by which a rank hands its numbers to the supervisor: one for each series, of signed 64-bit words.

The header: CHECK_MAGIC (stored last), the length in bytes of the JSON that follows it, the number of slots and their
size in words. The JSON, padded to whole words: ``key``, ``kind`` ("parameters" or "buffers"), ``every``, ``rank``,
``groups`` (lists of ranks) and ``tensors``: name, number of its group of replicas. Then the slots, a ring: sequence
number (odd while it is written), position (steps), CLOCK_MONOTONIC, count of losses, step of the first loss, rounds
(the steps for which the ranks have exchanged something; position counts those since then, too), the rank's own count
of steps, which numbers the sentinel's; and from word CHECK_SLOT on, per tensor its fingerprint, then per tensor its
largest magnitude, then per tensor that of its gradient, CHECK_WINDOW largest magnitudes of the sentinel's local
gradient by step, and the losses. All magnitudes and losses are float64.
"""

CHECK_MAGIC = 0x534146434B0001
CHECK_SUFFIX = ".check"
CHECK_OFF = ".check-off"  # an empty file: an error has ended the checks of this rank
CHECK_FULL = ".check-full"  # an empty file: this rank trains more than is checked
CHECK_LENGTH, CHECK_SLOTS, CHECK_SLOT_SIZE = 1, 2, 3
CHECK_HEADER = 4
CHECK_SLOT = 8
CHECK_WINDOW = 1024
VARIABLE = "SAFELAUNCH_CHECKS"  # every how many steps; set by the supervisor

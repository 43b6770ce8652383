"""A slow and lossy cable: ``relay.py DEVICE DEVICE DELAY_S LOSS`` carries frames between two network devices.

It stands in for ``tc netem``, which not every kernel has. The packets' own headers of offloaded work travel with them
(``PACKET_VNET_HDR``): checksums are not yet computed where a veth device hands a frame over.
"""

from __future__ import annotations

import heapq
import random
import select
import socket
import sys
import time

ETH_P_ALL = 3
PACKET_VNET_HDR = 15
MOST = 1 << 17  # bytes of a frame, segmentation offload included


def main() -> None:
    names, delay_s, loss = sys.argv[1:3], float(sys.argv[3]), float(sys.argv[4])
    ends = [_open(name) for name in names]
    to = {ends[0]: ends[1], ends[1]: ends[0]}
    chance = random.Random(names[0])
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    number = 0
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], wait_s)[0]:
            frame, about = end.recvfrom(MOST)
            if about[2] == socket.PACKET_OUTGOING or chance.random() < loss:
                continue
            number += 1
            heapq.heappush(waiting, (time.monotonic() + delay_s, number, to[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(waiting)
            try:
                end.send(frame)
            except OSError:
                continue  # the device is down, or its queue is full: the frame is lost


def _open(name: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(263, PACKET_VNET_HDR, 1)  # SOL_PACKET
    end.bind((name, ETH_P_ALL))
    return end


if __name__ == "__main__":
    main()

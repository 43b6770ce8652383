"""One job from its start to its end: the supervisor's loop, stalls, crashes, what a live run answers."""

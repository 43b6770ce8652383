"""All ranks hang at the same line, so no rank is more at fault than another."""

import time

from training import Training, parser

options = parser.parse_args()


def sync_with_tracker() -> None:
    time.sleep(86_400)


def main() -> None:
    with Training(options) as job:
        for step, batch in job.batches():
            job.train(batch)
            if step == options.after:
                sync_with_tracker()


if __name__ == "__main__":
    main()

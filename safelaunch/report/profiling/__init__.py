"""Where the time of a live run goes, by the samples of a recording (pure): ``verdict`` says it."""

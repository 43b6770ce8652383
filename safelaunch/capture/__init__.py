"""One file per source of evidence. None raises past its stage, or outlives its deadline."""

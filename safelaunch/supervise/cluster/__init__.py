"""Exchange between the supervisors of one job through the store of torchrun's agents."""

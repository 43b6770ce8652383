"""The supervisors of one job, together: what they share through the store of torchrun's agents."""

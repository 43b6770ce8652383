ROW_PROPERTY = "fault matrix"  # in which a test reports its row

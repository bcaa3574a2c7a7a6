"""Seconds of ops and calls: calibration of a device, links of a cluster, step time, search."""

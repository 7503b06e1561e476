"""Report on a run as one HTML page, and comparison of several runs, from the files in the runs' folders."""

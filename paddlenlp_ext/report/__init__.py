"""Report of a run as one HTML page, and comparison of several runs; reads the files in the folder of a run."""

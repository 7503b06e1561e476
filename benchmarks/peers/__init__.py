"""Programs of other toolkits that the benchmarks compare with."""

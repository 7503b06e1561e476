"""Pipeline parallelism: stages, schedule, runtime, and the cost model that balances the stages."""

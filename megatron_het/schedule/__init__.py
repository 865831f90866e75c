"""Pipeline schedules as data: generators, passes, validator, simulator, pictures.  Never imports torch."""

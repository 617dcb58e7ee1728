"""``fastplm study``: a declared grid of trainings and judges, to one table with intervals."""

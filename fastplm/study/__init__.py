"""``fastplm study``: a declared grid of trainings and evaluations, to one table with intervals."""

"""Training loops: RL and supervised runs, their options and schedules."""

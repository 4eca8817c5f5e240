"""Use planish's models in Inspect's tasks, and Inspect's tasks as evaluators of planish's runs."""

"""Short, complete training runs in child processes, and the Optuna studies that ask for them."""

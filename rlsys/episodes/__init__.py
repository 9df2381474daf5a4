"""Episodes: the model and an environment take turns, and a function of the user's plays the environment."""

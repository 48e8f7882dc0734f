"""How each method trains: one learner a kind of method."""

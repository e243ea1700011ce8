"""The training verbs, and the engines that implement them."""

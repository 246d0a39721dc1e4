"""What one can watch: the events of a training, where they go, and the page that shows them."""

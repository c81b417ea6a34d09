"""Times a server next to its engine, and counts the resources that a soak leaves taken."""

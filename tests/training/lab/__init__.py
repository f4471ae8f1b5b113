"""A laboratory of tiny real training runs with the recorder attached: honest in many forms, and each fault once."""

"""A laboratory of tiny jobs on several ranks with the recorder attached: honest in many forms, and each fault once."""

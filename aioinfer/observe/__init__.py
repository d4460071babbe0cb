"""What an engine did and when: always recorded, looked at when somebody asks."""

"""What runs the user's code or touches a device lives here, and returns evidence."""

"""An artifact that is opened on a device, and the options of opening it."""

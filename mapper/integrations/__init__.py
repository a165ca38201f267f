"""mapper inside other projects' loaders; each module needs the project it is named after."""

-- Brings a store of version 1 to version 2: owners have cost labels.
CREATE TABLE owners_with_labels (
  id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, kind TEXT NOT NULL, workload TEXT NOT NULL, team TEXT NOT NULL,
  labels TEXT NOT NULL, UNIQUE (namespace, kind, workload, team, labels)
);
INSERT INTO owners_with_labels SELECT id, namespace, kind, workload, team, '' FROM owners;
DROP TABLE owners;
ALTER TABLE owners_with_labels RENAME TO owners

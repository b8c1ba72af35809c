-- Makes a store of version 1. `days.day` and `versions.day` count days since 1970-01-01 UTC. A day's row names the version that holds.
-- Lines lie in the order in which they are summed. A line is a row per currency: seconds and energy are on its first row, on the others
-- they are 0 and NULL (a REAL that is 0 takes no room). Currency 0 is no money at all. A step that was released never changes.
CREATE TABLE nodes (id INTEGER PRIMARY KEY, cluster TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (cluster, name));
CREATE TABLE owners (
  id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, kind TEXT NOT NULL, workload TEXT NOT NULL, team TEXT NOT NULL,
  UNIQUE (namespace, kind, workload, team)
);
CREATE TABLE sorts (
  id INTEGER PRIMARY KEY, pool TEXT NOT NULL, model TEXT NOT NULL, mode TEXT NOT NULL, UNIQUE (pool, model, mode)
);
CREATE TABLE currencies (id INTEGER PRIMARY KEY, code TEXT NOT NULL UNIQUE);
INSERT INTO currencies (id, code) VALUES (0, '');
CREATE TABLE facts (
  id INTEGER PRIMARY KEY, instance_type TEXT NOT NULL, capacity_type TEXT NOT NULL, region TEXT NOT NULL,
  gpu_product TEXT NOT NULL, UNIQUE (instance_type, capacity_type, region, gpu_product)
);
CREATE TABLE versions (
  id INTEGER PRIMARY KEY, day INTEGER NOT NULL, number INTEGER NOT NULL, closed_at REAL NOT NULL,
  closed_by TEXT NOT NULL, reason TEXT NOT NULL, engine TEXT NOT NULL, simulated INTEGER NOT NULL,
  lines INTEGER NOT NULL, allocated_seconds REAL NOT NULL, UNIQUE (day, number)
);
CREATE TABLE days (
  day INTEGER PRIMARY KEY, version INTEGER NOT NULL REFERENCES versions (id),
  reopened_at REAL, reopened_by TEXT, reopened_reason TEXT
);
CREATE TABLE capacity (
  version INTEGER NOT NULL REFERENCES versions (id), cluster TEXT NOT NULL, seconds REAL NOT NULL,
  hours INTEGER NOT NULL, PRIMARY KEY (version, cluster)
) WITHOUT ROWID;
CREATE TABLE node_facts (
  version INTEGER NOT NULL REFERENCES versions (id), node INTEGER NOT NULL REFERENCES nodes (id),
  facts INTEGER NOT NULL REFERENCES facts (id), PRIMARY KEY (version, node)
) WITHOUT ROWID;
CREATE TABLE lines (
  version INTEGER NOT NULL REFERENCES versions (id), owner INTEGER NOT NULL REFERENCES owners (id),
  currency INTEGER NOT NULL REFERENCES currencies (id), sort INTEGER NOT NULL REFERENCES sorts (id),
  node INTEGER NOT NULL REFERENCES nodes (id),
  active REAL NOT NULL, idle REAL NOT NULL, unknown REAL NOT NULL, unpriced REAL NOT NULL, energy REAL,
  active_cost REAL NOT NULL, idle_cost REAL NOT NULL, unknown_cost REAL NOT NULL,
  PRIMARY KEY (version, owner, currency, sort, node)
) WITHOUT ROWID

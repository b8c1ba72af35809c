-- Brings a store of version 2 to version 3: active time and its money are divided into effective, ineffective and not profiled.
-- Of days that were closed before, all of it was not profiled.
ALTER TABLE lines RENAME COLUMN active TO unprofiled;
ALTER TABLE lines RENAME COLUMN active_cost TO unprofiled_cost;
ALTER TABLE lines ADD COLUMN effective REAL NOT NULL DEFAULT 0;
ALTER TABLE lines ADD COLUMN ineffective REAL NOT NULL DEFAULT 0;
ALTER TABLE lines ADD COLUMN effective_cost REAL NOT NULL DEFAULT 0;
ALTER TABLE lines ADD COLUMN ineffective_cost REAL NOT NULL DEFAULT 0

-- Version 1 of the tables and functions of a shared store. Whoever connects first runs this file, in one transaction and under a lock.
--
-- Everything is in a schema of its own, since names like "sessions" may be taken elsewhere. What a statement may see follows from
-- the setting sessiontree.scope, which each connection makes at its start: the scope of one tenant, or of all. Without the setting
-- it sees nothing. Superusers and roles with BYPASSRLS pass by the policies, so every statement asks "sees" as well.
--
-- Whatever writes is one statement and one transaction of a writer, and moves the writer's row from one batch to the next. Where the
-- row is not at the batch before, all of it fails. So a batch that is sent twice is applied once, whichever of the two comes first,
-- and its outcome can be read later. The statements for changes of sessions are the library's (postgres_statements.py), since one
-- statement costs half of what a function of five does. In the functions here every statement sees what was committed before it
-- began (READ COMMITTED, which connections ask for), so what is read once a row is locked is so until the end.

-- Where somebody else has made it for this role, the right to make schemas is not needed, which IF NOT EXISTS asks for.
DO $$
BEGIN
    IF to_regnamespace('sessiontree') IS NULL THEN
        CREATE SCHEMA sessiontree;
    END IF;
END $$;
SET LOCAL search_path = sessiontree, pg_temp;

CREATE TABLE format (version integer NOT NULL);
INSERT INTO format VALUES (1);

CREATE SEQUENCE numbers MINVALUE 1 MAXVALUE 4294967294;

CREATE TABLE sessions (
    number bigint PRIMARY KEY,
    version bigint NOT NULL DEFAULT 0,
    tip_session bigint,
    tip_ordinal integer,
    drops integer NOT NULL DEFAULT 0,
    removals integer NOT NULL DEFAULT 0,
    gone boolean NOT NULL DEFAULT false,
    tenant uuid, -- made of the tenant's name; NULL: no tenant
    name bytea NOT NULL,
    record bytea NOT NULL -- without the digest of the name; so is that of a head
);
CREATE UNIQUE INDEX sessions_name ON sessions (name, tenant) NULLS NOT DISTINCT WHERE NOT gone;
CREATE INDEX sessions_tip ON sessions (tip_session) WHERE tip_session IS NOT NULL;

-- A record of up to 1 KiB stands with what is known of its node, as "head": without what it begins with, which the row says already,
-- and that is put before it when it is read. A longer one stands in "bodies". Two bodies fill a page; of a record that is up to 1 KiB
-- longer than that, what is too much stands as "head". Of records of 1,000 tokens (4,132 bytes), 1,000 are read over the loopback in
-- 3.5 ms, and take 1.10 times the bytes of their tokens with all that belongs to them. Measured beside it: PostgreSQL's own pieces
-- (TOAST) 10 ms and 1.41 times; two rows for each record 9 ms and 1.39; whole in the row, which leaves half a page empty, 3.5 ms and
-- 2.06; tokens packed to 3 bytes each 3 ms, 2.5 more to unpack them, and 1.03.
CREATE TABLE nodes (
    session bigint NOT NULL,
    ordinal integer NOT NULL,
    parent integer NOT NULL,
    key bigint, -- modulo 2**64; NULL: 0
    tenant uuid,
    id bytea NOT NULL,
    head bytea,
    PRIMARY KEY (session, ordinal)
);
CREATE TABLE bodies (
    session bigint NOT NULL,
    ordinal integer NOT NULL,
    tenant uuid,
    body bytea NOT NULL,
    PRIMARY KEY (session, ordinal)
) WITH (toast_tuple_target = 8160);
ALTER TABLE bodies ALTER COLUMN body SET STORAGE EXTERNAL;

CREATE TABLE refs (
    session bigint NOT NULL,
    version bigint NOT NULL, -- the session's, when it was last written
    tenant uuid,
    name bytea NOT NULL,
    record bytea NOT NULL,
    PRIMARY KEY (session, name)
);
ALTER TABLE refs ALTER COLUMN record SET STORAGE EXTERNAL; -- of a long one a look reads the beginning alone

CREATE TABLE names (
    name bytea PRIMARY KEY,
    tenant uuid,
    record bytea NOT NULL
);

-- Blobs have a row each, and their bytes in pieces: nobody needs a large one whole. Tenants have prefixes of their own.
CREATE TABLE blobs (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name bytea NOT NULL UNIQUE,
    size bigint NOT NULL,
    made_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE blob_pieces (
    blob bigint NOT NULL REFERENCES blobs ON DELETE CASCADE,
    piece integer NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (blob, piece)
);
ALTER TABLE blob_pieces ALTER COLUMN data SET STORAGE EXTERNAL;

-- Of each that writes, its last batch and what came of it; NULL: it was called off.
CREATE TABLE writers (
    writer uuid PRIMARY KEY,
    batch bigint NOT NULL DEFAULT 0,
    moved timestamptz NOT NULL DEFAULT now(),
    outcome text
);

CREATE FUNCTION sessiontree.scope() RETURNS uuid LANGUAGE sql STABLE PARALLEL SAFE
RETURN nullif(current_setting('sessiontree.scope', true), '')::uuid;

CREATE FUNCTION sessiontree.sees(tenant uuid) RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE
RETURN sessiontree.scope() IN (tenant, '00000000-0000-0000-0000-000000000000');

DO $$
DECLARE
    of text;
BEGIN
    FOREACH of IN ARRAY ARRAY['sessions', 'nodes', 'bodies', 'refs', 'names'] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', of);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', of);
        EXECUTE format(
            'CREATE POLICY tenant ON %I USING ((SELECT scope()) IN (tenant, ''00000000-0000-0000-0000-000000000000''))', of
        );
    END LOOP;
END $$;

-- Names of a tenant's blobs begin with its scope.
ALTER TABLE blobs ENABLE ROW LEVEL SECURITY;
ALTER TABLE blobs FORCE ROW LEVEL SECURITY;
ALTER TABLE blob_pieces ENABLE ROW LEVEL SECURITY;
ALTER TABLE blob_pieces FORCE ROW LEVEL SECURITY;
CREATE POLICY tenant ON blobs USING (
    (SELECT scope()) = '00000000-0000-0000-0000-000000000000'
    OR substr(name, 1, 33) = (SELECT convert_to(replace(scope()::text, '-', '') || '/', 'UTF8'))
);
CREATE POLICY tenant ON blob_pieces USING (EXISTS (SELECT FROM blobs b WHERE b.number = blob));

-- What ends a batch that must not happen, with all that it did.
CREATE FUNCTION sessiontree.refuse(of uuid, this bigint) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'writer % is not at batch %', of, this - 1 USING ERRCODE = 'ST001';
END $$;

-- The end of every function that writes: batch "this" of a writer is done, and "came" of it.
CREATE FUNCTION sessiontree.done(of uuid, this bigint, came text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    UPDATE sessiontree.writers w SET batch = this, outcome = came, moved = now() WHERE w.writer = of AND w.batch = this - 1;
    IF NOT FOUND THEN
        PERFORM sessiontree.refuse(of, this);
    END IF;
    RETURN came;
END $$;

-- Nobody makes rows that he does not see.
CREATE FUNCTION sessiontree.check_owner(tenant uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF sessiontree.sees(tenant) IS NOT TRUE THEN
        RAISE EXCEPTION 'this connection is for another tenant' USING ERRCODE = 'insufficient_privilege';
    END IF;
END $$;

-- Who looks whether a name is free waits for whoever is about to take it. The row of the tip's session is locked, so that nothing is
-- dropped from it, and no count of its forks is taken, before this fork is there.
CREATE FUNCTION sessiontree.create_session(
    of uuid, this bigint,
    number bigint, name bytea, tenant uuid, record bytea, tip_session bigint, tip_ordinal integer, tip_drops integer,
    ordinals integer[], parents integer[], keys bigint[], ids bytea[], heads bytea[], texts bytea[],
    ref_names bytea[], ref_records bytea[]
) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    came text := 'made';
BEGIN
    PERFORM sessiontree.check_owner(tenant);
    PERFORM pg_advisory_xact_lock(hashtextextended('sessiontree ' || encode(name, 'hex'), 0));
    IF EXISTS (SELECT FROM sessiontree.sessions s WHERE s.name = name AND NOT s.gone AND sessiontree.sees(s.tenant)) THEN
        came := 'taken';
    ELSIF tip_session IS NOT NULL THEN
        PERFORM FROM sessiontree.sessions s
            WHERE s.number = tip_session AND s.drops = tip_drops AND sessiontree.sees(s.tenant) FOR SHARE;
        IF NOT FOUND THEN
            came := 'dropped';
        END IF;
    END IF;
    IF came = 'made' THEN
        INSERT INTO sessiontree.sessions (number, tip_session, tip_ordinal, tenant, name, record)
            VALUES (number, tip_session, tip_ordinal, tenant, name, record);
        FOR j IN 1 .. cardinality(ordinals) LOOP
            INSERT INTO sessiontree.nodes VALUES (number, ordinals[j], parents[j], keys[j], tenant, ids[j], heads[j]);
            IF texts[j] IS NOT NULL THEN
                INSERT INTO sessiontree.bodies VALUES (number, ordinals[j], tenant, texts[j]);
            END IF;
        END LOOP;
        INSERT INTO sessiontree.refs (session, version, tenant, name, record)
            SELECT number, 0, tenant, r.name, r.record FROM unnest(ref_names, ref_records) AS r(name, record);
    END IF;
    RETURN sessiontree.done(of, this, came);
END $$;

-- Returns 1 where it took effect, 0 where the session is not as it was.
CREATE FUNCTION sessiontree.remove(
    of uuid, this bigint, number bigint, version bigint, ordinals integer[], ref_names bytea[], forks bigint, whole boolean
) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_variable
BEGIN
    PERFORM FROM sessiontree.sessions s
        WHERE s.number = number AND s.version = version AND (s.gone OR NOT whole) AND sessiontree.sees(s.tenant) FOR UPDATE;
    IF NOT FOUND OR forks <> (SELECT count(*) FROM sessiontree.sessions s WHERE s.tip_session = number) THEN
        RETURN sessiontree.done(of, this, '0');
    END IF;
    DELETE FROM sessiontree.nodes n WHERE n.session = number AND (whole OR n.ordinal = ANY (ordinals));
    DELETE FROM sessiontree.bodies b WHERE b.session = number AND (whole OR b.ordinal = ANY (ordinals));
    DELETE FROM sessiontree.refs r WHERE r.session = number AND (whole OR r.name = ANY (ref_names));
    IF whole THEN
        DELETE FROM sessiontree.sessions s WHERE s.number = number;
    ELSE
        UPDATE sessiontree.sessions s SET removals = s.removals + 1 WHERE s.number = number;
    END IF;
    RETURN sessiontree.done(of, this, '1');
END $$;

-- Compare and set by value; a record that is NULL removes the name. A name that another tenant has is never as expected.
CREATE FUNCTION sessiontree.set_name(of uuid, this bigint, name bytea, tenant uuid, record bytea, expected bytea)
RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_variable
BEGIN
    PERFORM sessiontree.check_owner(tenant);
    IF expected IS NULL THEN
        INSERT INTO sessiontree.names VALUES (name, tenant, record) ON CONFLICT DO NOTHING;
    ELSIF record IS NULL THEN
        DELETE FROM sessiontree.names n WHERE n.name = name AND n.record = expected AND sessiontree.sees(n.tenant);
    ELSE
        UPDATE sessiontree.names n SET record = record
            WHERE n.name = name AND n.record = expected AND sessiontree.sees(n.tenant);
    END IF;
    RETURN sessiontree.done(of, this, CASE WHEN FOUND THEN '1' ELSE '0' END);
END $$;

-- Nodes as rows of 48 bytes: ordinal, parent, key, id.
CREATE FUNCTION sessiontree.rows_after(of bigint, after integer) RETURNS bytea LANGUAGE sql STABLE
RETURN (
    SELECT string_agg(int4send(n.ordinal) || int4send(n.parent) || int8send(coalesce(n.key, 0)) || n.id, '' ORDER BY n.ordinal)
    FROM sessiontree.nodes n WHERE n.session = of AND n.ordinal > after
);

-- What the record of a node begins with, as codec.py has it.
CREATE FUNCTION sessiontree.beginning(session bigint, ordinal integer, parent integer, id bytea, key bigint)
RETURNS bytea LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN '\x980201ce'::bytea || substr(int8send(session), 5) || '\xce'::bytea || int4send(ordinal) || '\xce'::bytea || int4send(parent)
    || '\xc420'::bytea || id || '\xcf'::bytea || int8send(coalesce(key, 0));
